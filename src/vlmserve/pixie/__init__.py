"""pixie: the built-in tiny vision-language model, the images it knows and how it is measured."""
