"""Fields of a request that say what its answer must be, and the constraint they make.

`response_format` is OpenAI's; `guided_json`, `guided_regex` and `guided_choice` are vLLM's names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hybrid.errors import HybridError, InvalidRequest
from hybrid.wire import Constraint


class Body(BaseModel):
    """A request's body: fields it does not know are refused."""

    model_config = ConfigDict(extra="forbid")


class NamedSchema(Body):
    """The `json_schema` of a response format."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None
    """Accepted as it comes: an answer always keeps to its schema."""


class TextFormat(Body):
    """No constraint."""

    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Body):
    """JSON that keeps to a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class Guided(Body):
    """The fields, at most one of which may say something."""

    guided_json: dict[str, Any] | str | None = None
    """A JSON schema, or one as text."""
    guided_regex: str | None = None
    """A pattern that the whole answer matches."""
    guided_choice: list[str] | None = None
    """The answers to choose from."""

    def guides(self) -> dict[str, Constraint]:
        """What each field that says something asks for.

        Raises:
            InvalidRequest: a schema that is no JSON object.
        """
        found: dict[str, Constraint] = {}
        response_format = getattr(self, "response_format", None)
        if isinstance(response_format, ObjectFormat):
            found["response_format"] = Constraint.json_object()
        elif isinstance(response_format, SchemaFormat):
            with _told("response_format"):
                schema = response_format.json_schema.schema_
                found["response_format"] = Constraint.json_schema(schema)
        if self.guided_json is not None:
            with _told("guided_json"):
                found["guided_json"] = Constraint.json_schema(_schema(self.guided_json))
        if self.guided_regex is not None:
            found["guided_regex"] = Constraint.regex(self.guided_regex)
        if self.guided_choice is not None:
            found["guided_choice"] = Constraint.choice(self.guided_choice)
        return found

    def constraint(self) -> Constraint | None:
        """What the answer is held to.

        Raises:
            InvalidRequest: two fields say something.
        """
        found = self.guides()
        if len(found) > 1:
            first, second, *_ = found
            raise InvalidRequest(f"{second} beside {first}; give one of them", param=second)
        return next(iter(found.values()), None)

    @contextmanager
    def telling_field(self) -> Iterator[None]:
        """The model names the kind of a constraint it refuses; the client is told its field."""
        try:
            yield
        except InvalidRequest as e:
            fields = {constraint.kind: name for name, constraint in self.guides().items()}
            if e.param not in fields:
                raise
            raise InvalidRequest(e.message, param=fields[e.param]) from None


def refuse_guides(body: Guided, why: str) -> None:
    """Raises InvalidRequest where a field says something."""
    for name in body.guides():
        raise InvalidRequest(f"{name}: {why}", param=name)


def _schema(given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        schema = json.loads(given)
    except (ValueError, RecursionError) as e:
        raise InvalidRequest(f"no JSON: {e}") from None
    if not isinstance(schema, dict):
        raise InvalidRequest("a schema is a JSON object")
    return schema


@contextmanager
def _told(field: str) -> Iterator[None]:
    try:
        yield
    except HybridError as e:
        raise InvalidRequest(f"{field}: {e.message}", param=field) from None
