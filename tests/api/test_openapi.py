"""The served OpenAPI document describes what is really taken and given."""

from __future__ import annotations

import json
import re

import httpx

from serve.api.protocol.chat import ChatCompletion
from serve.api.protocol.completions import Completion


def test_every_reference_of_the_document_leads_somewhere(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()

    references = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)))
    assert len(references) > 20
    for reference in references:
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_bodies_are_described_and_no_422_is_promised(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()

    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        operation = document["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        name = schema["$ref"].rsplit("/", 1)[1]
        assert document["components"]["schemas"][name]["properties"]
        assert {"200", "400", "401", "404", "413", "415", "429", "500", "503"} <= set(
            operation["responses"]
        )
    assert '"422"' not in json.dumps(document["paths"])


def test_parameters_in_paths_are_described(http: httpx.Client) -> None:
    for path, operations in http.get("/openapi.json").json()["paths"].items():
        for operation in operations.values():
            described = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
            assert described == set(re.findall(r"{(.+?)}", path)), path


def test_a_wrong_query_is_a_bad_request_like_any_other(http: httpx.Client) -> None:
    answer = http.get("/v1/scheduler/trace", params={"format": "xml"})

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == ("format", "invalid_request_error")
    assert "jsonl" in error["message"]


def test_answers_are_what_their_schemas_say(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    extras = {"prompt_logprobs": 1, "return_token_ids": True}
    for fields in ({}, extras):
        chat = http.post(
            "/v1/chat/completions", json={"messages": messages, "logprobs": True, **fields}
        )
        ChatCompletion.model_validate_json(chat.content)
        completion = http.post("/v1/completions", json={"prompt": "Hello", "logprobs": 1, **fields})
        Completion.model_validate_json(completion.content)


def test_the_documentation_page_is_served(http: httpx.Client) -> None:
    assert http.get("/docs").status_code == 200
