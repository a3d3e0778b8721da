"""The reader's side: find, fetch, verify and inject a published KV cache; prefill where that fails, and say why."""

from kvcdn.client.client import Answer, Client, Prepared
from kvcdn.client.plan import Prices
from kvcdn.client.report import MissReason, Report

__all__ = ["Answer", "Client", "MissReason", "Prepared", "Prices", "Report"]
