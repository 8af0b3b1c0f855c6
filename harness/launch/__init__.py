"""Rank processes: started once, kept warm, supervised to their end. Bytes in, bytes out."""
