"""What the server remembers: conversations, their items, responses and files, in SQLite or PostgreSQL."""
