"""The public attention calls: their arguments, validation, masks, padding and merge."""
