"""LangChain's published standard tests of chat models: ChatOpenAI from langchain-openai, over chat and over responses,
and ChatAnthropic from langchain-anthropic.

Part of `make clients`. Independent of what fails by design (explained.toml). Invariant: no standard test is overridden;
features are switched on and off only through the standard's own properties.
"""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatOpenAI(ChatModelIntegrationTests):  # type: ignore[misc]
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI  # type: ignore[no-any-return]

    @property
    def chat_model_params(self) -> dict[str, Any]:
        url = os.environ["LLMBACKEND_CLIENTS_URL"]
        return {
            "model": "demo",
            "base_url": f"{url}/v1",
            "api_key": "none",
            "temperature": 0,
            "frequency_penalty": 0.5,  # small models repeat themselves within a string until its length is reached
            "max_tokens": 600,
            "stream_usage": True,
            "max_retries": 0,
        }

    @property
    def model_override_value(self) -> str:
        return "other"

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema", "strict": True}


class TestFunctionCalling(TestChatOpenAI):
    """The same with structured output by calling a function, LangChain's other way."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}


class TestResponses(TestChatOpenAI):
    """The same over /v1/responses, which has no frequency penalty."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        params = {key: value for key, value in super().chat_model_params.items() if key != "frequency_penalty"}
        return params | {"use_responses_api": True}


class TestChatAnthropic(ChatModelIntegrationTests):  # type: ignore[misc]
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic  # type: ignore[no-any-return]

    @property
    def chat_model_params(self) -> dict[str, Any]:
        url = os.environ["LLMBACKEND_CLIENTS_URL"]
        return {
            "model": "demo",
            "base_url": url,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 600,
            "max_retries": 0,
        }

    @property
    def model_override_value(self) -> str:
        return "other"
