"""Where hits are searched, what is brought for one, and the plans that tell where its objects lie."""
