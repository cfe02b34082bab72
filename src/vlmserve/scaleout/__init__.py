"""Several engines behind one address: a gateway routes each request to a worker."""
