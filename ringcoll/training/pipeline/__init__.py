"""Pipelines: orders as data in `pipeline_schedule`, the `runner`, and its messages in `mailbox`."""
