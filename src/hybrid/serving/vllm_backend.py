"""vLLM as a Backend: it schedules for itself; we map requests, adapters and errors.

Needs the `gpu` extra and a GPU node. What vLLM's asynchronous engine does not offer here
(closed-set scoring, embeddings of a generating model) is refused as Unsupported.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from hybrid.errors import (
    AdapterRefused,
    ContextTooLong,
    InvalidRequest,
    MissingExtra,
    Unsupported,
)
from hybrid.serving.backend import AdapterRef, BackendInfo
from hybrid.wire import (
    Alternative,
    Chunk,
    Constraint,
    EmbedRequest,
    EmbedResult,
    GenerateRequest,
    Provenance,
    ScoreRequest,
    ScoreResult,
)


class VLLMBackend:
    """See `hybrid.serving.backend.Backend`.

    Args:
        path: a base in Hugging Face layout.
        base_digest: its digest; adapters of another are refused.
        release: shown in provenance.
        options: further fields of vLLM's AsyncEngineArgs.

    Raises:
        MissingExtra: vLLM is not installed.
    """

    def __init__(self, path: Path, base_digest: str, *, release: str, **options: Any) -> None:
        try:
            from vllm import AsyncEngineArgs, AsyncLLMEngine
        except ImportError:
            raise MissingExtra(
                "serving.backend is vllm, which is not installed: pip install 'hybrid[gpu]'"
            ) from None
        arguments = AsyncEngineArgs(
            model=str(path), enable_lora=True, max_loras=16, max_lora_rank=64, **options
        )
        self._engine = AsyncLLMEngine.from_engine_args(arguments)
        self._base_digest = base_digest
        self.release = release
        self._loaded: dict[str, Any] = {}
        self._loading = asyncio.Lock()

    async def generate(
        self, request: GenerateRequest, adapter: AdapterRef | None
    ) -> AsyncIterator[Chunk]:
        """Stream an answer; closing the iterator aborts it."""
        from vllm import SamplingParams, TokensPrompt

        s = request.sampling
        parameters = SamplingParams(
            max_tokens=s.max_tokens,
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k or -1,
            seed=s.seed,
            stop=list(s.stop) or None,
            logprobs=s.top_logprobs if s.logprobs else None,
            structured_outputs=_structured(s.constraint),
        )
        prompt: Any = (
            request.prompt
            if request.prompt is not None
            else TokensPrompt(prompt_token_ids=list(request.prompt_ids or ()))
        )
        provenance = Provenance(
            release=self.release,
            base_digest=self._base_digest,
            adapter=adapter.name if adapter else None,
            adapter_digest=adapter.digest if adapter else None,
        )
        lora = self._loaded[adapter.digest] if adapter else None
        shown = tokens = 0
        finished = False
        try:
            async for output in self._engine.generate(
                prompt, parameters, request.id, lora_request=lora
            ):
                answer = output.outputs[0]
                ids = tuple(answer.token_ids[tokens:])
                steps = (answer.logprobs or [])[tokens:]
                probabilities = [
                    [_alternative(t, entry) for t, entry in _chosen_first(step, token)]
                    for step, token in zip(steps, ids, strict=False)
                ]
                finished = output.finished
                yield Chunk(
                    text=answer.text[shown:],
                    token_ids=ids,
                    logprobs=tuple(row[0].logprob for row in probabilities),
                    pieces=tuple(row[0].piece for row in probabilities),
                    top_logprobs=tuple(
                        tuple(sorted(row, key=lambda a: -a.logprob)[: s.top_logprobs])
                        for row in probabilities
                    ),
                    finish_reason=("length" if answer.finish_reason == "length" else "stop")
                    if finished
                    else None,
                    prompt_tokens=len(output.prompt_token_ids or ()),
                    completion_tokens=len(answer.token_ids),
                    provenance=provenance,
                )
                shown, tokens = len(answer.text), len(answer.token_ids)
        except ValueError as e:
            kind = ContextTooLong if "length" in str(e) else InvalidRequest
            raise kind(str(e), param="prompt") from None
        finally:
            if not finished:
                await self._engine.abort(request.id)

    async def score(self, request: ScoreRequest, adapter: AdapterRef | None) -> ScoreResult:
        """Not offered."""
        raise Unsupported("closed-set scoring is not supported by the vllm backend; use `engine`")

    async def embed(self, request: EmbedRequest, adapter: AdapterRef | None) -> EmbedResult:
        """Not offered."""
        raise Unsupported("embeddings are not supported by the vllm backend; use `engine`")

    async def load(self, adapter: AdapterRef) -> int:
        """Add an adapter; vLLM checks its shapes. Its bytes are taken to be those of its files."""
        from vllm.lora.request import LoRARequest

        if adapter.base_digest != self._base_digest:
            raise AdapterRefused(
                f"adapter {adapter.name} was trained on base {adapter.base_digest}, served is"
                f" {self._base_digest}",
                param="model",
            )
        size = sum(f.stat().st_size for f in adapter.path.iterdir())
        async with self._loading:
            if adapter.digest in self._loaded:
                return size
            number = zlib.crc32(adapter.digest.encode()) or 1
            lora = LoRARequest(adapter.digest, number, str(adapter.path))
            try:
                await self._engine.add_lora(lora)
            except (ValueError, RuntimeError) as e:
                raise AdapterRefused(f"adapter {adapter.name}: {e}", param="model") from e
            self._loaded[adapter.digest] = lora
        return size

    async def unload(self, digest: str) -> None:
        """Remove an adapter."""
        lora = self._loaded.pop(digest, None)
        if lora is not None:
            await self._engine.remove_lora(lora.lora_int_id)

    async def cancel(self, request_id: str) -> bool:
        """Abort a request; vLLM does not say whether it knew it."""
        await self._engine.abort(request_id)
        return True

    async def info(self) -> BackendInfo:
        """Facts."""
        config = self._engine.model_config
        return BackendInfo(
            kind="vllm",
            base_digest=self._base_digest,
            context=config.max_model_len,
            counters={"adapters_loaded": float(len(self._loaded))},
        )

    async def close(self) -> None:
        """Stop the engine."""
        self._engine.shutdown()


def _structured(constraint: Constraint | None) -> Any:
    """vLLM's StructuredOutputsParams for a constraint."""
    if constraint is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    if constraint.kind == "regex":
        return StructuredOutputsParams(regex=constraint.text)
    if constraint.kind == "choice":
        return StructuredOutputsParams(choice=json.loads(constraint.text))
    if constraint.kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json=constraint.text)


def _chosen_first(step: dict[int, Any], chosen: int) -> list[tuple[int, Any]]:
    """A step's entries; vLLM lists the chosen token beside the likeliest."""
    return sorted(step.items(), key=lambda item: item[0] != chosen)


def _alternative(token: int, entry: Any) -> Alternative:
    return Alternative(token, (entry.decoded_token or "").encode(), entry.logprob)
