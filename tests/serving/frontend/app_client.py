"""A client that calls an application directly, without a network."""

import asyncio

import httpx


class Client:
    """Sends requests to an application one by one."""

    def __init__(self, app):
        self.app = app

    def get(self, path):
        return self.ask("GET", path)

    def post(self, path, json):
        return self.ask("POST", path, json=json)

    def ask(self, method, path, **options):
        async def exchange():
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(exchange())
