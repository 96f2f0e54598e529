"""What becomes of requests that still run when the front has waited long enough for them."""

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bpkv_trt.openai_front.refusal import Refusal

TOLD = Refusal(503, "The front is ending, and this answer would take too long; ask again later.")


class Ending:
    """Middleware: a request that is cancelled, as uvicorn does then, is told so, or cut off where it has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if not begun:
                await JSONResponse(TOLD.body(), TOLD.status)(scope, receive, send)
