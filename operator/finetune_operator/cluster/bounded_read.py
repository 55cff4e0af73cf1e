"""Reads what a server answers, up to a limit."""

from __future__ import annotations

from aiohttp import StreamReader


async def read_at_most(content: StreamReader, limit: int) -> bytes:
    """The first `limit` bytes of an answer, or all if there are fewer.

    One `read` of aiohttp gives what has come so far, which may end in the middle of a line.
    """
    blocks, size = [], 0
    while size < limit and (block := await content.read(limit - size)):
        blocks.append(block)
        size += len(block)
    return b"".join(blocks)
