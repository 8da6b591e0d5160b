"""How proxies carry a hand-off from one engine to another: pure functions of what ``kv_transfer_params`` hold."""
