"""The stages that teach pixie to read documents."""
