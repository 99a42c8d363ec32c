"""The client for each kind of URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from elastic_trainer.errors import ConfigError
from elastic_trainer.storage.client import Client

PACKAGES = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}


def client_for(url: str, options: Mapping[str, Any]) -> Client:
    """The client of a URL; a path without a scheme is a local folder.

    Raises:
        ConfigError: The scheme is unknown, its package is missing, or the URL holds credentials.
    """
    # imported here: a run on local files must not pay for S3's packages, nor need them
    if "://" not in url or url.startswith("file://"):
        from elastic_trainer.storage.local_client import LocalClient

        return LocalClient(url.removeprefix("file://"))
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"storage = {parts.scheme}://…@{parts.hostname}{parts.path} holds credentials, and a URL is printed and "
            "stored. Put them into storage_options or the environment."
        )
    if parts.scheme == "memory":
        raise ConfigError(
            f"storage = {url!r} lives in the memory of one process, and a run has many. Use a folder or s3://…"
        )
    if not parts.netloc:
        raise ConfigError(f"storage = {url!r} names no bucket. Write {parts.scheme}://bucket/prefix.")
    try:
        if parts.scheme == "s3":
            from elastic_trainer.storage.s3_client import S3Client

            return S3Client(parts.netloc + parts.path, options)
        from elastic_trainer.storage.fsspec_client import FsspecClient

        return FsspecClient(parts.scheme, parts.netloc + parts.path, options)
    except ImportError as error:
        extra = PACKAGES.get(parts.scheme)
        remedy = f"pip install 'elastic-trainer[{extra}]'" if extra else "Use a local path, s3://, gs:// or az://"
        raise ConfigError(f"storage = {url!r} needs a package that is not installed ({error}). {remedy}.") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"storage = {url!r}: {error}. Use a local path, s3://bucket/prefix, gs:// or az://."
        ) from None
