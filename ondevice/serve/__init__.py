"""`ondevice serve`: the HTTP dialects of OpenAI, Anthropic and Ollama over the public Python API.

`app` combines the parts; each dialect is one module. `exchange` runs a generation, `models` loads models and
admits requests, `guard` checks every request first. Only modules here import `starlette` and `uvicorn`, which
are the extra `serve`.
"""
