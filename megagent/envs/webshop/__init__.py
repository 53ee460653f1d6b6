"""A shop to buy from by text, after WebShop (Yao et al. 2022, arXiv 2207.01206), without HTML, Java or spaCy."""
