"""The limit of a Python HTTP server: uvicorn with an application that reads the body and returns fixed bytes.

    python -m benchmarks.bare_asgi ANSWER_FILE

It prints its port, then serves until it is killed.
"""

import asyncio
import socket
import sys
from pathlib import Path

import uvicorn
import uvloop


def application(answer):
    """An ASGI application that answers every request with ``answer``."""
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % len(answer))]

    async def respond(scope, receive, send):
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return respond


def main(answer_file):
    """Serve on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        app = application(Path(answer_file).read_bytes())
        config = uvicorn.Config(
            app, http="httptools", loop="none", ws="none", lifespan="off", access_log=False, log_config=None
        )
        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(uvicorn.Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    main(sys.argv[1])
