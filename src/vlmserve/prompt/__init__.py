"""Turn messages into token ids, and token ids into text."""
