//! What a data directory is, and what is refused.

use super::*;
use crate::env::Fs as _;

#[test]
fn data_dir_of_a_newer_version_is_refused() {
    let fs = SimFs::new(1);
    close(open(&fs));
    fs.damage(Path::new("/data/VERSION"), |bytes| *bytes = b"2\n".to_vec())
        .unwrap();
    let error = Store::open(config(&fs)).unwrap_err();
    assert!(matches!(
        error,
        Error::NewerVersion {
            found: 2,
            supported: 1,
            ..
        }
    ));
    assert!(
        error.to_string().contains("run the newer release"),
        "{error}"
    );
}

#[test]
fn data_dir_that_is_in_use_is_refused() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let error = Store::open(config(&fs)).unwrap_err();
    assert!(matches!(error, Error::Locked { .. }));
    assert!(
        error
            .to_string()
            .contains("/data is in use by another process"),
        "{error}"
    );
    close(store);
    open(&fs);
}

#[test]
fn data_dir_that_is_not_ours_is_refused_and_left_alone() {
    let fs = SimFs::new(1);
    fs.create_dir(Path::new(DIR)).unwrap();
    fs.create_new(Path::new("/data/holiday.jpg")).unwrap();
    let error = Store::open(config(&fs)).unwrap_err();
    assert!(matches!(error, Error::NotADataDir { .. }));
    assert!(error.to_string().contains("holiday.jpg"), "{error}");
    assert_eq!(fs.files(), [Path::new("/data/holiday.jpg")]);
}

#[test]
fn data_dir_on_a_fresh_mount_is_taken() {
    let fs = SimFs::new(1);
    fs.create_dir(Path::new(DIR)).unwrap();
    fs.create_dir(Path::new("/data/lost+found")).unwrap();
    open(&fs);
}

#[test]
fn data_dir_that_lost_its_identity_or_meta_log_is_refused() {
    for lost in ["IDENTITY", "meta"] {
        let fs = SimFs::new(1);
        let store = open(&fs);
        store.create_log(key(1), small()).unwrap();
        close(store);
        for path in fs.files() {
            if path.starts_with(Path::new(DIR).join(lost)) {
                fs.remove_file(&path).unwrap();
            }
        }
        let error = Store::open(config(&fs)).unwrap_err();
        assert!(
            matches!(error, Error::DataDirDamaged { .. }),
            "{lost}: {error}"
        );
    }
    let fs = SimFs::new(1);
    close(open(&fs));
    fs.damage(Path::new("/data/IDENTITY"), |bytes| bytes[9] ^= 1)
        .unwrap();
    assert!(matches!(
        Store::open(config(&fs)),
        Err(Error::DataDirDamaged { .. })
    ));
}

#[test]
fn meta_log_of_another_broker_is_refused() {
    let (one, two) = (SimFs::new(1), SimFs::new(2));
    close(open(&one));
    close(open(&two));
    let identity = crate::env::read_all(&two, Path::new("/data/IDENTITY"), 100).unwrap();
    one.damage(Path::new("/data/IDENTITY"), |bytes| *bytes = identity)
        .unwrap();
    let error = Store::open(config(&one)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("files of two data directories were mixed"),
        "{error}"
    );
}

#[test]
fn identity_stays_and_boots_rise() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let identity = store.identity();
    assert_ne!(identity.0, 0);
    assert_eq!(store.boot(), 1);
    assert!(store.earlier_processes().is_empty());
    let mut processes = vec![store.process()];
    let mut fs = fs;
    for boot in 2..5 {
        // S23: synced before anybody hears of it.
        fs = fs.crash();
        let store = open(&fs);
        assert_eq!((store.identity(), store.boot()), (identity, boot));
        assert_eq!(store.earlier_processes(), processes);
        processes.insert(0, store.process());
    }
}

#[test]
fn first_start_cut_off_at_any_change_starts_again() {
    for changes in 0..60 {
        let fs = SimFs::new(changes);
        fs.power_off_after(changes);
        let first = Store::open(config(&fs)).map(|store| {
            let identity = store.identity();
            close(store);
            identity
        });
        let fs = fs.crash();
        let store = open(&fs);
        if let Ok(identity) = first {
            assert_eq!(store.identity(), identity, "after {changes} changes");
        }
    }
}

#[test]
fn full_disk_at_the_start_is_said_clearly() {
    for capacity in [0, 100, 5000, 1 << 19] {
        let fs = SimFs::new(1);
        fs.set_capacity(capacity);
        let error = Store::open(config(&fs)).unwrap_err();
        assert!(matches!(error, Error::DiskFull { .. }), "{error}");
        assert!(
            error
                .to_string()
                .contains("free some space, then start again"),
            "{error}"
        );
    }
}

#[test]
fn s22_unknown_directories_are_kept_and_reported() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    store.create_log(key(1), small()).unwrap();
    close(store);
    fs.create_dir(&dir_of(2)).unwrap();
    fs.create_new(&dir_of(2).join("00000000000000000000.log"))
        .unwrap();
    fs.create_dir(Path::new("/data/topics/stranger")).unwrap();
    fs.create_new(Path::new("/data/topics/stranger/x")).unwrap();
    let store = open(&fs);
    assert_eq!(
        store.unknown_dirs(),
        [dir_of(2), PathBuf::from("/data/topics/stranger/x")]
    );
    assert_eq!(store.replicas(), [key(1)]);
    assert!(fs.exists(&dir_of(2)).unwrap());
}

#[test]
fn s22_directory_with_data_that_is_not_listed_is_not_taken_over() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let log = store.create_log(key(1), small()).unwrap();
    fill(&log, 1, 3, 10);
    drop(log);
    let path = segment_of(2, 0);
    fs.create_dir(&dir_of(2)).unwrap();
    let bytes = crate::env::read_all(&fs, &segment_of(1, 0), 1 << 20).unwrap();
    let file = fs.create_new(&path).unwrap();
    file.write_all_at(&mut [std::io::IoSlice::new(&bytes)], 0)
        .unwrap();
    assert!(matches!(
        store.create_log(key(2), small()),
        Err(Error::Conflict { .. })
    ));
    assert!(fs.exists(&path).unwrap());
}

#[test]
fn delete_log_cut_off_at_any_change_is_finished_or_never_was() {
    for changes in 0..12 {
        let fs = SimFs::new(changes);
        let store = open(&fs);
        let log = store.create_log(key(1), small()).unwrap();
        fill(&log, 1, 20, 300);
        drop(log);
        fs.power_off_after(changes);
        let deleted = store.delete_log(key(1)).is_ok();
        let fs = fs.crash();
        let store = open(&fs);
        assert!(store.unknown_dirs().is_empty(), "after {changes}");
        if store.replicas().is_empty() {
            assert!(!fs.exists(&dir_of(1)).unwrap(), "after {changes}");
        } else {
            assert!(!deleted, "after {changes}");
            assert_eq!(content(&store.open_log(key(1), small()).unwrap()).len(), 20);
        }
    }
}

#[test]
fn create_log_cut_off_at_any_change_is_whole_or_can_be_made_again() {
    for changes in 0..25 {
        let fs = SimFs::new(changes);
        let store = open(&fs);
        fs.power_off_after(changes);
        let made = store.create_log(key(1), small()).is_ok();
        let fs = fs.crash();
        let store = open(&fs);
        let log = if store.replicas().is_empty() {
            assert!(!made, "after {changes}");
            store.create_log(key(1), small()).unwrap()
        } else {
            store.open_log(key(1), small()).unwrap()
        };
        fill(&log, 1, 3, 10);
    }
}
