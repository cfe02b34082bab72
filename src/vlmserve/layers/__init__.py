"""Building blocks of decoders and towers."""
