"""What all tests share: real servers."""

from localstack.fixtures import s3_url, seaweedfs

__all__ = ["s3_url", "seaweedfs"]
