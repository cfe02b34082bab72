"""Resources that requests hold while they run: memory, images and adapters."""
