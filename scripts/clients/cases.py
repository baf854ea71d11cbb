"""The features of client libraries, as functions by name; `check.py` runs each against a demo server.

Schemas have only numbers and choices, so that a small model's answers are short. A case fails by raising.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

Case = Callable[[str], None]  # takes the server's URL
CASES: dict[tuple[str, str], Case] = {}  # by distribution and feature

ADAPTER = "poet"
QUESTION = "How is the weather?"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
DOCUMENTS = ["storm", "the sea"]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


def case(distribution: str, feature: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[distribution, feature] = function
        return function

    return add


def check_arguments(text: str) -> None:
    Weather.model_validate_json(text)


# --- openai ---


def _openai(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@case("openai", "chat, streamed with usage")
def _(url: str) -> None:
    options = {"include_usage": True}
    stream = _openai(url).chat.completions.create(
        model=ADAPTER, messages=[_user()], max_tokens=8, stream=True, stream_options=options
    )
    assert list(stream)[-1].usage.completion_tokens == 8


@case("openai", "chat.completions.parse")
def _(url: str) -> None:
    answer = _openai(url).chat.completions.parse(model=ADAPTER, messages=[_user()], response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)


@case("openai", "tools, required")
def _(url: str) -> None:
    answer = _openai(url).chat.completions.create(
        model=ADAPTER, messages=[_user()], tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls
    check_arguments(call.function.arguments)
    history = [_user(), answer.choices[0].message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "It rains."})
    _openai(url).chat.completions.create(model=ADAPTER, messages=history, tools=[TOOL], max_tokens=4)


@case("openai", "tools, streamed")
def _(url: str) -> None:
    with _openai(url).chat.completions.stream(
        model=ADAPTER, messages=[_user()], tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        kinds = {event.type for event in stream}
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert "tool_calls.function.arguments.delta" in kinds, kinds
    check_arguments(call.function.arguments)


@case("openai", "responses, streamed")
def _(url: str) -> None:
    with _openai(url).responses.stream(model=ADAPTER, input=QUESTION, text_format=Weather) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created", kinds
    assert isinstance(final.output_parsed, Weather)


@case("openai", "responses.parse, tools")
def _(url: str) -> None:
    client = _openai(url)
    parsed = client.responses.parse(model=ADAPTER, input=QUESTION, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    tool = {"type": "function", **TOOL["function"], "strict": True}  # type: ignore[dict-item]
    answer = client.responses.create(model=ADAPTER, input=QUESTION, tools=[tool], tool_choice="required")
    check_arguments(next(item for item in answer.output if item.type == "function_call").arguments)


@case("openai", "embeddings")
def _(url: str) -> None:
    found = _openai(url).embeddings.create(model=ADAPTER, input=["sea", "storm"])
    assert len(found.data) == 2
    assert abs(sum(value * value for value in found.data[0].embedding) - 1) < 1e-3


# --- anthropic ---


def _anthropic(url: str) -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=url, api_key="none", max_retries=0)


@case("anthropic", "messages, streamed")
def _(url: str) -> None:
    with _anthropic(url).messages.stream(model=ADAPTER, messages=[_user()], max_tokens=8) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens"
    assert final.content[0].text == text


@case("anthropic", "messages, tools")
def _(url: str) -> None:
    function: Any = TOOL["function"]
    tool = {key: function[key] for key in ("name", "description")} | {"input_schema": function["parameters"]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = _anthropic(url).messages.create(
        model=ADAPTER, messages=[_user()], max_tokens=200, tools=[tool], tool_choice=choice
    )
    Weather.model_validate(next(block for block in answer.content if block.type == "tool_use").input)
    assert answer.stop_reason == "tool_use"


@case("anthropic", "messages.count_tokens")
def _(url: str) -> None:
    assert _anthropic(url).messages.count_tokens(model=ADAPTER, messages=[_user()]).input_tokens > 3


@case("langchain-anthropic", "bind_tools")
def _(url: str) -> None:
    answer = _langchain_anthropic(url).bind_tools([TOOL], tool_choice="any").invoke(QUESTION)
    Weather.model_validate(answer.tool_calls[0]["args"])


@case("langchain-anthropic", "bind_tools, streamed")
def _(url: str) -> None:
    pieces = list(_langchain_anthropic(url).bind_tools([TOOL], tool_choice="weather").stream(QUESTION))
    answer = sum(pieces[1:], pieces[0])
    Weather.model_validate(answer.tool_calls[0]["args"])


@case("langchain-anthropic", "with_structured_output: json_schema")
def _(url: str) -> None:
    model = _langchain_anthropic(url).with_structured_output(Weather, method="json_schema")
    assert isinstance(model.invoke(QUESTION), Weather)


def _langchain_anthropic(url: str) -> Any:
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model=ADAPTER, base_url=url, api_key="none", max_tokens=200, max_retries=0)


# --- litellm ---


@case("litellm", "tools")
def _(url: str) -> None:
    answer = _litellm(url, tools=[TOOL], tool_choice="required")
    check_arguments(answer.choices[0].message.tool_calls[0].function.arguments)


@case("litellm", "json_schema")
def _(url: str) -> None:
    check_arguments(_litellm(url, response_format=Weather).choices[0].message.content)


@case("litellm", "embedding")
def _(url: str) -> None:
    import litellm

    found = litellm.embedding(f"openai/{ADAPTER}", input=["sea"], api_base=f"{url}/v1", api_key="none")
    assert len(found.data) == 1


@case("litellm", "responses")
def _(url: str) -> None:
    import litellm

    answer = litellm.responses(
        model=f"openai/{ADAPTER}", input=QUESTION, api_base=f"{url}/v1", api_key="none", max_output_tokens=16
    )
    assert answer.usage.output_tokens == 16


@case("litellm", "rerank")
def _(url: str) -> None:
    import litellm

    for provider, api_base in (("hosted_vllm", f"{url}/v1"), ("cohere", url), ("jina_ai", url)):
        found = litellm.rerank(
            f"{provider}/{ADAPTER}", query="sea", documents=DOCUMENTS, top_n=1, api_base=api_base, api_key="none"
        )
        assert [result["index"] for result in found.results] == [1], (provider, found)


def _litellm(url: str, **fields: Any) -> Any:
    import litellm

    return litellm.completion(
        f"openai/{ADAPTER}", messages=[_user()], api_base=f"{url}/v1", api_key="none", max_tokens=200, **fields
    )


# --- LangChain ---


def _langchain(url: str, **fields: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=ADAPTER, base_url=f"{url}/v1", api_key="none", max_retries=0, **fields)


@case("langchain-openai", "bind_tools")
def _(url: str) -> None:
    answer = _langchain(url).bind_tools([TOOL], tool_choice="any").invoke(QUESTION)
    Weather.model_validate(answer.tool_calls[0]["args"])


@case("langchain-openai", "with_structured_output: json_schema")
def _(url: str) -> None:
    assert isinstance(_langchain(url).with_structured_output(Weather, method="json_schema").invoke(QUESTION), Weather)


@case("langchain-openai", "with_structured_output: function_calling")
def _(url: str) -> None:
    model = _langchain(url).with_structured_output(Weather, method="function_calling")
    assert isinstance(model.invoke(QUESTION), Weather)


@case("langchain-openai", "with_structured_output: json_mode")
def _(url: str) -> None:
    found = _langchain(url, max_tokens=200).with_structured_output(None, method="json_mode", include_raw=True)
    assert json.loads(found.invoke("Answer in JSON.")["raw"].content or "{}") is not None


@case("langchain-openai", "use_responses_api")
def _(url: str) -> None:
    answer = _langchain(url, use_responses_api=True, max_tokens=16).invoke(QUESTION)
    assert answer.usage_metadata["output_tokens"] == 16


@case("langchain-openai", "embeddings of texts")
def _(url: str) -> None:
    from langchain_openai import OpenAIEmbeddings

    found = OpenAIEmbeddings(
        model=ADAPTER, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
    ).embed_documents(["sea", "storm"])
    assert len(found) == 2


# --- instructor, pydantic-ai, openai-agents ---


@case("instructor", "TOOLS")
def _(url: str) -> None:
    _instructor(url, "TOOLS")


@case("instructor", "JSON_SCHEMA")
def _(url: str) -> None:
    _instructor(url, "JSON_SCHEMA")


def _instructor(url: str, mode: str) -> None:
    import instructor

    client = instructor.from_openai(_openai(url), mode=instructor.Mode[mode])
    answer = client.chat.completions.create(
        model=ADAPTER, messages=[_user()], response_model=Weather, max_retries=0, max_tokens=200
    )
    assert isinstance(answer, Weather)


@case("pydantic-ai-slim", "output_type")
def _(url: str) -> None:
    assert isinstance(_pydantic_ai(url, Weather), Weather)


@case("pydantic-ai-slim", "NativeOutput")
def _(url: str) -> None:
    from pydantic_ai import NativeOutput

    assert isinstance(_pydantic_ai(url, NativeOutput(Weather)), Weather)


def _pydantic_ai(url: str, output_type: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(ADAPTER, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    return Agent(model, output_type=output_type, retries=0).run_sync(QUESTION).output


@case("openai-agents", "tools, over its default, /v1/responses")
def _(url: str) -> None:
    _agents(url, streamed=False)


@case("openai-agents", "tools, streamed")
def _(url: str) -> None:
    _agents(url, streamed=True)


def _agents(url: str, *, streamed: bool) -> None:
    from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    called = []

    @function_tool
    def weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
        """Tells the weather."""
        called.append((city, days))
        return "It rains."

    async def run() -> None:
        set_tracing_disabled(True)
        set_default_openai_client(
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), use_for_tracing=False
        )
        # Without parallel calls, because a small model calls until max_tokens, which is an error here.
        settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=200)
        agent = Agent(
            name="a", model=ADAPTER, tools=[weather], model_settings=settings, tool_use_behavior="stop_on_first_tool"
        )
        if not streamed:
            await Runner.run(agent, QUESTION)
            return
        result = Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass

    asyncio.run(run())
    assert called


# --- LlamaIndex, smolagents, haystack, cohere ---


@case("llama-index-llms-openai-like", "structured_predict: should_use_structured_outputs")
def _(url: str) -> None:
    _llama_index(url, should_use_structured_outputs=True)


@case("llama-index-llms-openai-like", "structured_predict: is_function_calling_model")
def _(url: str) -> None:
    _llama_index(url, is_function_calling_model=True)


def _llama_index(url: str, **settings: bool) -> None:
    from llama_index.core.prompts import PromptTemplate
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=ADAPTER, api_base=f"{url}/v1", api_key="none", is_chat_model=True, max_tokens=200, **settings
    )
    assert isinstance(model.structured_predict(Weather, PromptTemplate(QUESTION)), Weather)


@case("smolagents", "ToolCallingAgent's model call, whole and streamed")
def _(url: str) -> None:
    from smolagents import OpenAIServerModel, tool

    @tool
    def weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
        """Tells the weather.

        Args:
            city: The city.
            days: How many days.
        """
        return f"{city} {days}"

    model = OpenAIServerModel(ADAPTER, api_base=f"{url}/v1", api_key="none", max_tokens=200)
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    fields: dict[str, Any] = {"tools_to_call_from": [weather], "stop_sequences": ["Observation:", "Calling tools:"]}
    check_arguments(model.generate(messages, **fields).tool_calls[0].function.arguments)
    calls = [call for delta in model.generate_stream(messages, **fields) for call in delta.tool_calls or ()]
    check_arguments("".join(call.function.arguments or "" for call in calls if call.index == 0))


@case("haystack-ai", "OpenAIChatGenerator: response_format")
def _(url: str) -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    settings = {"response_format": Weather}
    generator = OpenAIChatGenerator(Secret.from_token("none"), ADAPTER, None, f"{url}/v1", generation_kwargs=settings)
    check_arguments(generator.run([ChatMessage.from_user(QUESTION)])["replies"][0].text)


@case("cohere", "ClientV2.rerank")
def _(url: str) -> None:
    from cohere import ClientV2

    found = ClientV2("none", base_url=url).rerank(model=ADAPTER, query="sea", documents=DOCUMENTS, top_n=1)
    assert [result.index for result in found.results] == [1]


def _user() -> dict[str, str]:
    return {"role": "user", "content": QUESTION}
