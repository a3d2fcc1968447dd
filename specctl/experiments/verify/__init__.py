"""Whether decoding keeps the target's law, checked on the user's own pair; each file says what it sees and what not."""
