"""Requests that arrived on their own, outside a step or as turns of its episodes: one response each, open
until it ends.

They share queue, instances and assignments with the step's responses. Their numbers begin at
`FIRST_REQUEST`, so that they never meet those of a step. None waits for others of its group, so they go
before the groups of a step; a group only says where a prefix may be cached.

Guarantees: a request ends once, and is then forgotten; the counts agree with the states (`check`).
"""

from __future__ import annotations

from rlboost_runtime.core.base.messages import FinishReason, ResponseRequest
from rlboost_runtime.core.state.responses import Response, ResponseState, new_response


class OpenRequests:
    """The requests that have not ended, by number."""

    def __init__(self) -> None:
        self.responses: dict[int, Response] = {}

    def open(self, request: ResponseRequest, at: float) -> Response | None:
        """Take a request in; None if it is known."""
        if request.response in self.responses:
            return None
        response = new_response(request, request.response, at)
        self.responses[request.response] = response
        return response

    def run(self, response: Response, assignment: int, holder: str, at: float) -> None:
        """Give a waiting request to an instance."""
        response.begin(assignment, holder, at)

    def wait(self, response: Response, why: str, at: float) -> None:
        """Take a running request back."""
        response.lifecycle.move(ResponseState.WAITING, why, at)
        response.let_go()

    def end(self, response: Response, at: float, num_tokens: int, reason: FinishReason | None) -> None:
        """Forget a request; `reason` None: it was withdrawn."""
        was_running = response.state is ResponseState.RUNNING
        over = ResponseState.CANCELLED if reason is None else ResponseState.FINISHED
        response.lifecycle.move(over, reason or "withdrawn", at)
        if was_running:
            response.let_go()
        response.num_tokens, response.finish_reason = num_tokens, reason
        del self.responses[response.response]

    def check(self) -> None:
        """Assert that only open requests are known."""
        for number, response in self.responses.items():
            assert number == response.response
            assert response.state in (ResponseState.WAITING, ResponseState.RUNNING), response.lifecycle
            response.check()
