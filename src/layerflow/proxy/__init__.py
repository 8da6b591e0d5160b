"""The prefill/decode proxy: OpenAI's API in front of engines that prefill and engines that decode."""
