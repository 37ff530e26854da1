//! Who is alive: foca over UDP.
