"""Requests in the shape of OpenAI's API, as a thin client of a Triton server; nothing is decided here."""
