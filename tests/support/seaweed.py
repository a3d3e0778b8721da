"""The S3 server of tests: the one that benchmarks start as well."""

from __future__ import annotations

from kvcdn.cli.seaweed import BUCKET, HOST, REGION, Keys, S3Server, running_seaweed, weed_binary

__all__ = ["BUCKET", "HOST", "REGION", "Keys", "S3Server", "running_seaweed", "weed_binary"]
