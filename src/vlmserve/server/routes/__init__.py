"""One file for each of the APIs that the server speaks."""
