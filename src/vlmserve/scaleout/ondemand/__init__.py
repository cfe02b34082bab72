"""Serve several models at one address: processes start on the first request and end when others need the memory."""
