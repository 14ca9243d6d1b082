"""The live runtime: a durable server that clients join over HTTP."""
