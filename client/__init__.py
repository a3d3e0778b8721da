"""The reader's side: find, fetch, verify and inject a published KV cache; prefill where that fails, and say why."""

from kvcdn.client.aio import AsyncClient
from kvcdn.client.answer import Answer, Continuation, Prepared
from kvcdn.client.client import Client
from kvcdn.client.conversation import Conversation
from kvcdn.client.loading.report import Audited, MissReason, Report
from kvcdn.client.planning.plan import Prices
from kvcdn.client.planning.race import StoppedError
from kvcdn.client.prefix import Prefix
from kvcdn.client.streaming import AnswerStream, Stop
from kvcdn.client.usage import Usage

__all__ = [
    "Answer",
    "AnswerStream",
    "AsyncClient",
    "Audited",
    "Client",
    "Continuation",
    "Conversation",
    "MissReason",
    "Prefix",
    "Prepared",
    "Prices",
    "Report",
    "Stop",
    "StoppedError",
    "Usage",
]
