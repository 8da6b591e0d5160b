"""The orders in which prefill and decode engines are asked, and what follows when one of them fails."""
