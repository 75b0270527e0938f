"""The fields of a body that give the output a form: OpenAI's `response_format`, vLLM's `structured_outputs`, and its
older `guided_*`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.structured_output import FORMS, StructuredOutputsParams

Text = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[Text], Field(min_length=1, max_length=4096)]
Schema = str | dict[str, Any]


class JsonSchema(BaseModel):
    """`name`, `description` and `strict` change nothing: the schema is always kept to the letter."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> Self:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("the type json_schema needs json_schema.schema")
        return self

    def form(self) -> StructuredOutputsParams | None:
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=self.json_schema.schema_)


class StructuredOutputs(BaseModel):
    """As StructuredOutputsParams; a field that is none of its own is refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def form(self) -> StructuredOutputsParams | None:
        given = self.model_dump(by_alias=True, exclude_none=True)
        named = any(given.get(name, False) is not False for name in FORMS)  # an empty schema is a form: any JSON
        return StructuredOutputsParams(**given) if named else None


class FormFields(BaseModel):
    """The part of a body that says which form the output has."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    def form(self) -> tuple[str, StructuredOutputsParams] | None:
        """The form, and the field that gives it; None: any text.

        Raises:
            QtoolError: more than one field gives a form, or one is invalid in itself.
        """
        found: list[tuple[str, StructuredOutputsParams]] = []
        for name in ("response_format", "structured_outputs"):
            body = getattr(self, name)
            if body is not None and (form := body.form()) is not None:
                found.append((name, form))
        for kind in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{kind}")
            if value is not None:
                pattern = self.guided_whitespace_pattern
                found.append((f"guided_{kind}", StructuredOutputsParams(**{kind: value}, whitespace_pattern=pattern)))
        if len(found) > 1:
            raise QtoolError(f"{' and '.join(name for name, _ in found)} do not go together: give one of them")
        return found[0] if found else None
