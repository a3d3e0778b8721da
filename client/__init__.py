"""The reader's side: find, fetch, verify and inject a published KV cache; prefill where that fails, and say why."""

from kvcdn.client.answer import Answer, Continuation, Prepared
from kvcdn.client.client import Client
from kvcdn.client.conversation import Conversation
from kvcdn.client.plan import Prices
from kvcdn.client.prefix import Prefix
from kvcdn.client.report import Audited, MissReason, Report
from kvcdn.client.streaming import AnswerStream

__all__ = [
    "Answer",
    "AnswerStream",
    "Audited",
    "Client",
    "Continuation",
    "Conversation",
    "MissReason",
    "Prefix",
    "Prepared",
    "Prices",
    "Report",
]
