"""Loading an adapter in PEFT's format, after a strict preflight: it fits, or it is refused.

A file's names say what PEFT computes, on a tied base too: an embedding of the adapter's own leaves
the head as the base's unless the file also holds a head (measured with PEFT 0.21).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hybrid.engine.lora import Adapter, Layout, Saved
from hybrid.engine.model import Decoder
from hybrid.engine.preflight import EMBEDDING, ENDS, HEAD, LoraSpec, Refuse
from hybrid.errors import AdapterRefused

_PREFIX = "base_model.model."
_FILES = ("adapter_config.json", "adapter_model.safetensors")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_adapter(
    folder: Path, decoder: Decoder, *, name: str, digest: str, base_digest: str, served_base: str
) -> Adapter:
    """Read an adapter and check it against the base it is to run on.

    Served is LoRA on any projection, on the embedding and on the head, of any mix of ranks, and an
    embedding or a head of the adapter's own (`modules_to_save`); float32, bfloat16, float16 or
    float64 on disk, the base's dtype in memory.

    Args:
        folder: adapter_config.json and adapter_model.safetensors.
        base_digest: of the base the adapter was trained on.
        served_base: of the base it would run on.

    Raises:
        AdapterRefused: another base or vocabulary, missing or damaged files, features that are not
            computed here, targets that match nothing, ranks, shapes or dtypes that do not fit, NaN
            or infinity. Nothing else, whatever the files hold.
    """

    def refuse(why: str) -> AdapterRefused:
        return AdapterRefused(f"adapter {name} ({digest[:12]}): {why}", param="model")

    if base_digest != served_base:
        raise refuse(f"trained on base {base_digest}, served is {served_base}")
    for file in _FILES:
        if not (folder / file).exists():
            raise refuse(f"{file} is missing")
    spec = LoraSpec.read(folder / _FILES[0], refuse)
    shape = decoder.shape
    if spec.biases and (shape.qkv_bias or shape.o_bias or shape.mlp_bias):
        raise refuse("bias='all' or 'lora_only' is not supported on a base that has biases")
    weights = _Weights.read(folder / _FILES[1], decoder, spec, refuse)

    found = {site: weights.pair(site) for site in weights.projections}
    layout = Layout.of(
        shape, max((a.shape[1] for a, _ in found.values()), default=1), frozenset(found)
    )
    row = torch.zeros(layout.size, dtype=decoder.dtype, device=decoder.device)
    for (layer, module), (a, b) in found.items():
        layout.write(row, layer, module, a, b)
    made = Adapter(digest, layout, row, weights.end(EMBEDDING), weights.end(HEAD))
    for held in made.tensors:
        if not torch.isfinite(held).all():
            raise refuse(f"its scaling makes weights NaN or infinity in {decoder.dtype}")
    return made


@dataclass(eq=False)
class _Weights:
    """The tensors of a file by what they are for, each checked when it is taken.

    projections: {A, B} by (layer, projection), as on disk: A [r, in], B [out, r]. lora: the same
    for ENDS; the embedding's A is [r, vocab] and its B [hidden, r]. whole: [vocab, hidden].
    """

    decoder: Decoder
    spec: LoraSpec
    refuse: Refuse
    projections: dict[tuple[int, str], dict[str, Tensor]] = field(default_factory=dict)
    lora: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, decoder: Decoder, spec: LoraSpec, refuse: Refuse) -> _Weights:
        """Every tensor of the file has its place, and every place of a pair its tensor."""
        try:
            state = load_file(path)
        # Also what its own reader and torch raise at headers that are well-formed but wrong.
        except (SafetensorError, OSError, ValueError, TypeError, LookupError, RuntimeError) as e:
            raise refuse(f"{path.name} cannot be read: {e}") from None
        made = cls(decoder, spec, refuse)
        shape = decoder.shape
        places = {
            f"{_PREFIX}{module_name(layer, name)}.lora_{half}.weight": ((layer, name), half)
            for layer in range(shape.layers)
            for name in shape.projections()
            for half in "AB"
        }
        ends = {f"{_PREFIX}{EMBEDDING}.lora_embedding_{half}": (EMBEDDING, half) for half in "AB"}
        ends |= {f"{_PREFIX}{HEAD}.lora_{half}.weight": (HEAD, half) for half in "AB"}
        copies = {f"{_PREFIX}{end}.base_layer.weight": end for end in ENDS}
        own = {f"{_PREFIX}{end}.weight": end for end in ENDS}
        for key, tensor in sorted(state.items()):
            if tensor.dtype not in _DTYPES:
                raise refuse(f"weight {key} is {tensor.dtype}, no float that is served")
            if not torch.isfinite(tensor).all():
                raise refuse(f"weight {key} holds NaN or infinity")
            if key in places:
                site, half = places[key]
                made.projections.setdefault(site, {})[half] = tensor
            elif key in ends:
                end, half = ends[key]
                made.lora.setdefault(end, {})[half] = tensor
            elif key in own:
                made.whole[own[key]] = tensor
            elif key in copies:
                if not made._is_the_bases(copies[key], tensor):
                    raise refuse(f"weight {key} is not what the served base has there")
            else:
                raise refuse(f"weight {key} matches nothing in the base")
        if not (made.projections or made.lora or made.whole):
            raise refuse("it holds no LoRA weights")
        made._check_whole()
        made._check_targets()
        return made

    def _check_targets(self) -> None:
        """The file has LoRA where its configuration says so, and nowhere else.

        PEFT passes over what is too much and starts anew what is missing: another adapter.
        """
        shape, spec = self.decoder.shape, self.spec
        has = {module_name(*site) for site in self.projections} | self.lora.keys()
        says = {
            module
            for layer in range(shape.layers)
            for name in shape.projections()
            if spec.has_lora(module := module_name(layer, name))
        }
        says |= {end for end in ENDS if spec.has_lora(end)}
        if shape.tied and spec.tied and EMBEDDING in says:
            says.add(HEAD)  # PEFT takes it out of the targets, and saves it
        for module in sorted(has - says):
            raise self.refuse(f"{module} has LoRA weights, but target_modules does not name it")
        for module in sorted(says - has):
            raise self.refuse(f"target_modules names {module}, but its weights are missing")

    def _check_whole(self) -> None:
        spec, tied = self.spec, self.decoder.shape.tied and self.spec.tied
        named = spec.saved | ({HEAD} if tied and EMBEDDING in spec.saved else set())
        for end in sorted(spec.saved - self.whole.keys()):
            raise self.refuse(f"modules_to_save names {end}, but its weight is missing")
        for end in sorted(self.whole):
            if self._is_the_bases(end, self.whole[end], exactly=end in named):
                del self.whole[end]  # `save_embedding_layers=True`, or never trained
            elif end not in named:
                raise self.refuse(f"{end} is not the base's, and modules_to_save does not name it")
            elif end in self.lora:
                raise self.refuse(f"{end} is both saved whole and a LoRA target")
        if (
            tied
            and EMBEDDING in spec.saved
            and not _same(self.whole.get(EMBEDDING), self.whole.get(HEAD))
        ):
            raise self.refuse("its embedding and its head are to be tied, but differ")

    def _is_the_bases(self, end: str, tensor: Tensor, *, exactly: bool = False) -> bool:
        """Whether a copy [vocab, hidden] is the served base's; if not `exactly`, in the coarser
        dtype of the two.

        PEFT saves copies of embeddings that it adapts, and of those that were resized.
        """
        decoder = self.decoder
        expected = (decoder.shape.vocab, decoder.shape.hidden)
        self._check_vocabulary(end, tensor, 0)
        if tuple(tensor.shape) != expected:
            raise self.refuse(f"{end}: weight {tuple(tensor.shape)}, expected {expected}")
        if end == HEAD and not decoder.shape.tied:
            packed = decoder.head.weight
            weight = packed.to_dense() if decoder.head.packed else packed
        else:
            weight = decoder.embedding
        # A base in float32 may have been copied in bfloat16, and the other way round on a GPU.
        dtype = tensor.dtype if decoder.dtype == torch.float32 and not exactly else decoder.dtype
        return torch.equal(weight.to("cpu", dtype), tensor.to(dtype))

    def _check_vocabulary(self, end: str, tensor: Tensor, dim: int) -> None:
        vocab = self.decoder.shape.vocab
        if tensor.ndim == 2 and tensor.shape[dim] != vocab:
            raise self.refuse(
                f"vocabulary mismatch: its {end} has {tensor.shape[dim]} tokens, the base {vocab}"
            )

    def pair(self, site: tuple[int, str]) -> tuple[Tensor, Tensor]:
        """a [in, r] and b [r, out] of a projection as the engine holds them, scaled."""
        layer, name = site
        shape = self.decoder.shape
        n_in, n_out, _, _ = shape.projections()[name]
        a, b = self._checked(module_name(layer, name), self.projections[site], n_in, n_out)
        if name in ("q_proj", "k_proj"):
            b = b[:, shape.paired(n_out // shape.head_dim)]
        return a, b

    def end(self, end: str) -> Saved | None:
        """What it has of its own at an end of the model, in the base's dtype."""
        shape, pair = self.decoder.shape, self.lora.get(end)

        def hold(tensor: Tensor) -> Tensor:
            return tensor.to(self.decoder.device, self.decoder.dtype).contiguous()

        if end in self.whole:
            return Saved(whole=hold(self.whole[end]))
        if pair is None:
            return None
        for half, dim in (("A", 1),) if end == EMBEDDING else (("B", 0),):
            if half in pair:
                self._check_vocabulary(end, pair[half], dim)
        dims = (shape.vocab, shape.hidden) if end == EMBEDDING else (shape.hidden, shape.vocab)
        a, b = self._checked(end, pair, *dims)
        return Saved(a=hold(a), b=hold(b))

    def _checked(
        self, module: str, pair: dict[str, Tensor], n_in: int, n_out: int
    ) -> tuple[Tensor, Tensor]:
        """a [in, r] and b [r, out] with the scaling in b, float32."""
        if pair.keys() != {"A", "B"}:
            raise self.refuse(f"{module} has only lora_{next(iter(pair))}")
        a, b, rank = pair["A"], pair["B"], self.spec.rank_of(module)
        if tuple(a.shape) != (rank, n_in) or tuple(b.shape) != (n_out, rank):
            raise self.refuse(
                f"{module}: A {tuple(a.shape)} and B {tuple(b.shape)}, expected"
                f" {(rank, n_in)} and {(n_out, rank)}"
            )
        return a.t().float(), b.t().float() * self.spec.scaling_of(module)


def module_name(layer: int, projection: str) -> str:
    """A projection's full name, e.g. `model.layers.0.mlp.up_proj`."""
    part = "mlp" if projection in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"model.layers.{layer}.{part}.{projection}"


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
