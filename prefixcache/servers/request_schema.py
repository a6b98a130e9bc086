"""What a request may say: one model for each kind of request, each field with its type, its range and its line in the docs.

`checked` reads a request's body by its model, whatever brought it. Fields that no model has pass as they are. The table in
docs/servers.md is made from here (`python -m tools.api_page`), and so is the remedy of each error.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from prefixcache.keys import SESSION_LIMIT

LEAST_PENALTY = 0.01
SALT_LIMIT = 1024  # characters of a request's cache_salt
STOPS, STOP_LIMIT = 64, 1024  # stop texts in a request, and characters of one
COLDEST = 2e-4  # of temperatures: below it half precision leaves no token a finite probability, so it means 0
SHOWN = 40  # characters of a value in an error
HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # of surrogates
SECRET = {"cache_salt"}  # fields whose value no error repeats
TEMPLATE = "chat_template"
TEMPLATES_OWN = {  # keywords of a chat template's call that are not its variables
    "add_generation_prompt",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
NO_TEMPLATE = (
    "this server renders no chat template that a request brings along; leave {} out, or start the server with "
    "--allow-chat-template"
)


class RequestRefused(ValueError):
    """A request that is answered with an error: the text says why, and what to send. `status`: HTTP's for it."""

    def __init__(self, text: str, status: int = 400):
        super().__init__(text)
        self.status = status


class Said(NamedTuple):
    """In a field's annotation: what docs and errors say that it may be, in place of its type and range."""

    text: str


def _no_nul(name: str) -> str:
    if "\0" in name:
        raise ValueError("NUL")
    return name


def _greedy(temperature: float | None) -> float | None:
    return 0.0 if temperature is not None and temperature < COLDEST else temperature


def _none_or_finite(penalty: float) -> float:
    if 0 < penalty < LEAST_PENALTY:  # logits divided by it would be infinite, which JSON can't say
        raise ValueError("tiny")
    return penalty


def _one_or_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) and stop else stop


Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-10_000, le=10_000, allow_inf_nan=False)]
Token = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Recent = Annotated[int, Field(ge=0, le=1_000_000)]
Count = Annotated[int, Field(ge=1, le=2**63 - 1)]
Name = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_no_nul), Said("a name or a folder")]
Stop = Annotated[str, Field(min_length=1, max_length=STOP_LIMIT)]
Object = dict[str, Any]
Ttl = Literal["5m", "1h"]


class RequestPart(BaseModel):
    """A request, or an object in it. Fields that it doesn't know pass as they are."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(RequestPart):
    include_usage: bool | None = False


class ResponseFormat(RequestPart):
    type: Literal["text"]


class CacheWish(BaseModel):
    """What a request asks the cache for."""

    model_config = ConfigDict(strict=True, extra="forbid")

    ttl: Ttl | None = None
    system_ttl: Ttl | None = None
    store: bool | None = None
    session: Annotated[str, Field(min_length=1, max_length=SESSION_LIMIT)] | None = None


class Message(RequestPart):
    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str | list[Object] | None, Said("a text or a list of parts")] = None
    tool_calls: list[Object] | None = None


class GenerationRequest(RequestPart):
    """What requests of each kind may say. A field that is null is not given."""

    model: Name = Field(
        "default_model", description="The model; `default_model` is the one that the server started with."
    )
    adapters: Name | None = Field(None, description="The folder of a LoRA adapter.")
    draft_model: Name = Field("default_model", description="The draft model.")
    num_draft_tokens: Annotated[int, Field(ge=0, le=256)] | None = Field(
        None, description="Tokens that the draft model drafts at a time. Default: `--num-draft-tokens`."
    )
    max_tokens: Count | None = Field(
        None,
        description="Tokens of the answer, at most; no more than the model's context leaves. Default: `--max-tokens`.",
    )
    max_completion_tokens: Count | None = Field(None, description="The same; it counts where both are given.")
    n: Annotated[int, Field(ge=1, le=1), Said("1")] = Field(1, description="Answers to a request.")
    stream: bool = Field(False, description="Whether the answer comes piece by piece.")
    stream_options: Annotated[StreamOptions | None, Said('an object such as {"include_usage": true}')] = Field(
        None, description="Of a stream: whether it ends with the usage."
    )
    stop: Annotated[
        list[Stop] | None,
        BeforeValidator(_one_or_list),
        Field(max_length=STOPS),
        Said(
            f"a string or a list of strings, none of them empty or longer than {STOP_LIMIT:,} characters, {STOPS} at most"
        ),
    ] = Field(
        None,
        description="Texts that end the answer, in whichever tokens it has them; with mlx-lm 0.31 in those that a text has "
        "by itself.",
    )
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] | None = Field(
        None, description="Makes sampling repeatable; the request is served by itself."
    )
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False), AfterValidator(_greedy)] | None = Field(
        None, description=f"0 takes the likeliest token; less than {COLDEST:g} means 0. Default: `--temp`."
    )
    top_p: Share | None = Field(
        None, description="Sampling from the likeliest tokens with this share. Default: `--top-p`."
    )
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        None, description="Sampling from so many tokens, fewer than the model has; 0 is all. Default: `--top-k`."
    )
    min_p: Share | None = Field(
        None, description="Least probability, beside the likeliest token's. Default: `--min-p`."
    )
    xtc_probability: Share = Field(0.0, description="How often the likeliest tokens are excluded.")
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = Field(
        0.1, description="Probability of a token that may be excluded."
    )
    repetition_penalty: Annotated[
        float,
        Field(ge=0, le=100, allow_inf_nan=False),
        AfterValidator(_none_or_finite),
        Said(f"0, or a number from {LEAST_PENALTY} to 100"),
    ] = Field(0.0, description="Divides the logits of tokens that were there; 0 is none.")
    repetition_context_size: Recent = Field(20, description="Tokens that it looks back at.")
    presence_penalty: Penalty = Field(0.0, description="Taken from the logits of tokens that were there.")
    presence_context_size: Recent = Field(20, description="Tokens that it looks back at.")
    frequency_penalty: Penalty = Field(0.0, description="The same, for each time that they were there.")
    frequency_context_size: Recent = Field(20, description="Tokens that it looks back at.")
    logit_bias: Annotated[
        dict[Token, Bias] | None, Said("an object of token ids, each with a number from -10,000 to 10,000")
    ] = Field(None, description="Added to these tokens' logits.")
    logprobs: bool = Field(
        False, description="Whether the answer has the probability of each token; a stream never has."
    )
    top_logprobs: Annotated[int, Field(ge=-1, le=11)] = Field(
        -1, description="And those of so many likeliest tokens; -1 is none."
    )
    cache_salt: Annotated[
        str | None, Field(max_length=SALT_LIMIT), Said(f"a string of at most {SALT_LIMIT} Unicode characters")
    ] = Field(None, description="Keeps a [tenant's](#tenants) prompts apart.")
    cache: Annotated[
        CacheWish | None,
        Said('an object with `ttl` ("5m" or "1h"), `system_ttl`, `store` (true or false) or `session` (a name)'),
    ] = Field(None, description="How long the prompt is [kept, or that nothing is](agents.md#keep-and-forget).")


class ChatRequest(GenerationRequest):
    """A chat: `/v1/chat/completions`."""

    messages: Annotated[
        list[Message], Field(min_length=1), Said('a list of objects such as {"role": "user", "content": "..."}')
    ] = Field(description="The chat so far.")
    tools: list[Object] | None = Field(None, description="Tools that the model may call.")
    tool_choice: Annotated[
        Literal["auto", "none"] | None, Said('"auto" or "none", since no answer is held to a call')
    ] = Field(None, description="`none` leaves the tools out.")
    response_format: Annotated[ResponseFormat | None, Said('{"type": "text"}, since no answer is held to a schema')] = (
        Field(None, description="The form of the answer.")
    )
    role_mapping: dict[str, str] | None = Field(
        None, description="What stands before a role's text, for a model without a chat template."
    )
    chat_template_kwargs: Object | None = Field(
        None, description='Variables of the chat template, such as {"enable_thinking": false}.'
    )
    chat_template: Annotated[str | None, Field(min_length=1, max_length=1 << 20)] = Field(
        None, description="Another template for this request, with `--allow-chat-template` only."
    )


class TextRequest(GenerationRequest):
    """A text to go on with: `/v1/completions`."""

    prompt: Annotated[str, Said("one string")] = Field(description="The text.")


def checked(kind: type[GenerationRequest], body: Any, *, allow_chat_template: bool = False) -> dict[str, Any]:
    """Return the fields of a request of this kind, without those that are null, its numbers as its model has them.

    RequestRefused says which field is wrong, and what it may be. A template that the request brings along is in
    `chat_template_kwargs`.
    """
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    if (name := _field_with_half_a_pair(given)) is not None:
        raise RequestRefused(f"{_wanted(kind, name)}: it has half of a surrogate pair, which is no character")
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise RequestRefused(_first_wrong(kind, given, error)) from None
    read = {name: getattr(request, name) for name in request.model_fields_set & kind.model_fields.keys()}
    given |= {name: value for name, value in read.items() if not isinstance(value, (BaseModel, list, dict))}
    if request.stop is not None:
        given["stop"] = request.stop
    if request.stream_options is not None:
        given["stream_options"] = {"include_usage": bool(request.stream_options.include_usage)}
    if given.get("tool_choice") == "none":
        given.pop("tools", None)
    return _with_template(given, allowed=allow_chat_template) if kind is ChatRequest else given


def _with_template(given: dict[str, Any], *, allowed: bool) -> dict[str, Any]:
    variables = dict(given.get("chat_template_kwargs") or {})
    for name in variables:
        if name in TEMPLATES_OWN:
            raise RequestRefused(f"chat_template_kwargs.{name} is not a variable of a chat template; leave it out")
    place = TEMPLATE if TEMPLATE in given else f"chat_template_kwargs.{TEMPLATE}"
    template = given.pop(TEMPLATE, variables.pop(TEMPLATE, None))
    if template is not None:
        if not allowed:
            raise RequestRefused(NO_TEMPLATE.format(place))
        if not isinstance(template, str):
            raise RequestRefused(f"{place} must be a string, not {shown(template)}")
        variables[TEMPLATE] = template
    return {**given, "chat_template_kwargs": variables} if variables else given


# -- what is wrong ----------------------------------------------------------------------------------------------------


def _first_wrong(kind: type[GenerationRequest], given: dict[str, Any], error: ValidationError) -> str:
    """Return what the first field that is wrong must be, and what is wrong in it."""
    first = error.errors(include_url=False, include_context=False)[0]
    name, *inside = map(str, first["loc"])
    text = _wanted(kind, name)
    if name in SECRET or (first["type"] == "missing" and not inside):
        return text
    if not (place := _dotted(inside)):
        return f"{text}, not {shown(given[name])}"
    return f"{text}: {place} is wrong, {shown(first['input'])}"


def _wanted(kind: type[GenerationRequest], name: str) -> str:
    """Return what a field must be, in words."""
    field = kind.model_fields.get(name)
    return f"{_printable(name)} must be {value_of(field) if field is not None else 'Unicode text'}"


def _dotted(place: list[str]) -> str:
    """Return a place within a field, without the names that pydantic gives to the types of a union."""
    return ".".join(_printable(part) for part in place if "[" not in part and part not in ("str", "list", "dict"))


def shown(value: Any) -> str:
    """Return a value as JSON, short enough for an error; of a list or an object its length."""
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**SHOWN:
        return f"an integer of {value.bit_length()} bits"
    return _printable(json.dumps(value[: SHOWN + 1] if isinstance(value, str) else value))


def _printable(text: str) -> str:
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _field_with_half_a_pair(given: dict[str, Any]) -> str | None:
    """Return the field that has, however deep, a text with half of a surrogate pair. UTF-8 has no bytes for it, so neither
    tokenizers nor logs survive it.
    """
    for name, value in given.items():
        waiting: list[Any] = [name, value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                if not value.isascii() and HALF_A_PAIR.search(value):
                    return name
            elif isinstance(value, dict):
                waiting += value.keys()
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value
    return None


# -- the docs ---------------------------------------------------------------------------------------------------------


class FieldRow(NamedTuple):
    """A field in the docs."""

    name: str
    value: str
    default: str
    about: str


def rows(kind: type[GenerationRequest]) -> Iterator[FieldRow]:
    """Give the fields that this kind adds to those of its base, in the order in which they are declared."""
    base: Any = kind.__base__
    for name, field in kind.model_fields.items():
        if name in base.model_fields:
            continue
        default = "needed" if field.is_required() else "" if field.default is None else f"`{json.dumps(field.default)}`"
        yield FieldRow(name, value_of(field), default, field.description or "")


def value_of(field: FieldInfo) -> str:
    """Return what a field may be, in words."""
    return _in_words(field.annotation, field.metadata)


def _in_words(annotation: Any, metadata: list[Any]) -> str:
    for said in metadata:
        if isinstance(said, Said):
            return said.text
    if get_origin(annotation) is Annotated:
        inner, *about = get_args(annotation)
        parts = [part for said in about for part in (said.metadata if isinstance(said, FieldInfo) else [said])]
        return _in_words(inner, parts)
    if get_origin(annotation) in (Union, types.UnionType):
        first = next(part for part in get_args(annotation) if part is not type(None))
        return _in_words(first, metadata)
    if annotation in (int, float):
        low, high = (next(getattr(bound, end) for bound in metadata if hasattr(bound, end)) for end in ("ge", "le"))
        return f"{'an integer' if annotation is int else 'a number'} from {_figure(low)} to {_figure(high)}"
    origin = get_origin(annotation) or annotation
    if origin is dict:
        return "an object of strings" if get_args(annotation)[1] is str else "an object"
    return {bool: "true or false", str: "a string", list: "a list of objects"}[origin]


def _figure(number: float) -> str:
    if isinstance(number, int) and number > 10**9:
        power = number.bit_length() - (number & (number - 1) == 0)
        return f"2**{power} - 1" if number == 2**power - 1 else f"2**{power}"
    return f"{number:,}"
