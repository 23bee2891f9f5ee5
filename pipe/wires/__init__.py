"""How tensors get from one rank to another, and what ranks say when one fails."""
