//! Where the programs under test are.
//!
//! Cargo builds a package's programs for that package's own integration tests only. So this
//! package declares both programs again, from the same source files (`Cargo.toml`), and each
//! integration test passes on what `env!("CARGO_BIN_EXE_...")` says: always built, always of the
//! profile and the sources under test, with no second cargo inside a test.

use std::path::PathBuf;

/// The two programs.
#[derive(Clone, Debug)]
pub struct Binaries {
    /// `qute-broker`.
    pub broker: PathBuf,
    /// `qute`.
    pub qute: PathBuf,
}

/// The programs that cargo built for the calling integration test.
#[macro_export]
macro_rules! binaries {
    () => {
        $crate::binaries::Binaries {
            broker: env!("CARGO_BIN_EXE_qute-broker-under-test").into(),
            qute: env!("CARGO_BIN_EXE_qute-under-test").into(),
        }
    };
}
