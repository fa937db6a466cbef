"""`ondevice serve`: the HTTP dialects of OpenAI, Anthropic and Ollama over the public Python API.

`app` puts the parts together; each dialect is a module of its own. `exchange` runs a generation, `models`
decides which model is loaded and whose turn it is, `guard` is what a request meets first. Only modules here
import `starlette` and `uvicorn`, which are the extra `serve`.
"""
