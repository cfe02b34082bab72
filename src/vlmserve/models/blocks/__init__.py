"""The blocks of decoder layers."""
