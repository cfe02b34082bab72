"""pixie: the built-in tiny vision-language model, the pictures it knows and how it is measured."""
