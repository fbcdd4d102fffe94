"""Whatever the API's own description allows, and much that it does not: always an answer, never a
fault of the server's."""

from __future__ import annotations

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
TAKING = {
    ("POST", "/v1/completions"): 60,
    ("POST", "/v1/chat/completions"): 60,
    ("POST", "/generate"): 60,
    ("POST", "/abort_request"): 15,
}
"""Operations that take a body, and how many requests to each."""
OTHERS = 3
ANSWER_SECONDS = 10


@pytest.fixture
def api(server, engine):
    engine.output = list(b"an answer to anything at all")
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def requests_to(operation, mode: GenerationMode, count: int, session: requests.Session) -> int:
    """Make so many requests to one operation and check the answers; how many were made."""
    made = 0

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=count,
        phases=[Phase.explicit, Phase.generate],
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Case) -> None:
        nonlocal made
        made += 1
        if made % 2 and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "fake-model"  # else no request would get past its name
        case.call_and_validate(session=session, checks=CHECKS, timeout=ANSWER_SECONDS)

    ask()
    return made


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_is_answered_by_a_fault(api, engine, http, mode):
    made: dict[tuple[str, str], int] = {}
    with requests.Session() as session:
        session.trust_env = False
        for found in api.get_all_operations():
            operation = found.ok()
            name = operation.method.upper(), operation.path
            # What takes nothing cannot be given anything wrong.
            if mode is GenerationMode.POSITIVE or name in TAKING:
                count = TAKING.get(name, OTHERS)
                made[name] = requests_to(operation, mode, count, session)
    assert TAKING.keys() <= made.keys()
    assert sum(made.values()) > 100
    # And afterwards everybody is served as before.
    body = {"model": "fake-model", "prompt": "x"}
    assert http.post("/v1/completions", json=body).status_code == 200
