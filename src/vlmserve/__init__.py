"""vlmserve: a vision-language model server for many users at once, on a CPU or a GPU."""
