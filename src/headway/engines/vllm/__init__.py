"""vLLM as Headway's engine.

process/ runs in the gateway: it starts, supervises and talks to `vllm serve`. plugin/ runs inside vLLM: its
scheduler, KV connectors and control route. The modules beside them are used by both.
"""
