"""tileattn inside other packages. Importing one of these modules imports the package it is for."""
