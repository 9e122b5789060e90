"""The JSON that clients send and get, as pydantic models.

In requests every optional field may be null, which means the same as leaving it out: `None` is each
field's default, and what that amounts to is decided in one place (`serve.api.answering.convert`).
Numbers are checked for type and finiteness here and for range by `SamplingParams`.
"""
