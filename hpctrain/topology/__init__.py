"""The fabric: what is cabled to what, which way packets go, where ranks belong. Pure: text in, values out."""
