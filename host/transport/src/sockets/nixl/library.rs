//! Is the library there? It must be known before it is called: the bindings end the process when it is not.

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use super::settings::NixlSettings;
use crate::TransportError;

/// The name by which the bindings look for it. Once a library of this name is loaded, from wherever, they find that one.
const NAME: &str = "libnixl_capi.so";

/// What is called: the bindings end the process also for a function that is missing.
const FUNCTIONS: [&CStr; 29] = [
    c"nixl_capi_create_configured_agent",
    c"nixl_capi_destroy_agent",
    c"nixl_capi_get_plugin_params",
    c"nixl_capi_create_backend",
    c"nixl_capi_destroy_backend",
    c"nixl_capi_params_add",
    c"nixl_capi_destroy_params",
    c"nixl_capi_destroy_mem_list",
    c"nixl_capi_create_reg_dlist",
    c"nixl_capi_reg_dlist_add_desc",
    c"nixl_capi_reg_dlist_clear",
    c"nixl_capi_destroy_reg_dlist",
    c"nixl_capi_register_mem",
    c"nixl_capi_deregister_mem",
    c"nixl_capi_get_local_md",
    c"nixl_capi_load_remote_md",
    c"nixl_capi_invalidate_remote_md",
    c"nixl_capi_create_xfer_dlist",
    c"nixl_capi_xfer_dlist_add_desc",
    c"nixl_capi_xfer_dlist_clear",
    c"nixl_capi_destroy_xfer_dlist",
    c"nixl_capi_create_xfer_req",
    c"nixl_capi_post_xfer_req",
    c"nixl_capi_get_xfer_status",
    c"nixl_capi_release_xfer_req",
    c"nixl_capi_destroy_xfer_req",
    c"nixl_capi_create_notif_map",
    c"nixl_capi_get_notifs",
    c"nixl_capi_destroy_notif_map",
];

/// Which library this process has loaded; it stays loaded.
static LOADED: Mutex<Option<Option<PathBuf>>> = Mutex::new(None);

/// Loads the library that the settings name, once for the process.
pub(super) fn load(settings: &NixlSettings) -> Result<(), TransportError> {
    if let Some((name, value)) = settings.unapplied() {
        let there = std::env::var(name).map_or_else(|_| "unset".to_owned(), |there| format!("{there:?}"));
        let why = format!(
            "NIXL needs {name}={value} before it is loaded, and it is {there}: set it, or apply the settings first"
        );
        return Err(TransportError::Unavailable(why));
    }
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(dir) = &*loaded {
        if *dir == settings.library_dir {
            return Ok(());
        }
        let why =
            format!("{NAME} was loaded from {dir:?}, and a process has one; {:?} needs another", settings.library_dir);
        return Err(TransportError::Unavailable(why));
    }
    open(settings)?;
    *loaded = Some(settings.library_dir.clone());
    Ok(())
}

fn open(settings: &NixlSettings) -> Result<(), TransportError> {
    let (path, place) = match &settings.library_dir {
        Some(dir) => (dir.join(NAME), dir.display().to_string()),
        None => (PathBuf::from(NAME), "where the loader looks (LD_LIBRARY_PATH, ld.so.conf)".to_owned()),
    };
    let unavailable = |what: &str| {
        TransportError::Unavailable(format!(
            "{NAME} of NIXL 1.5, looked for in {place}: {what}; install it, or name its folder"
        ))
    };
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| unavailable("its name has a zero in it"))?;
    // SAFETY: a C string. The library's own initialisers run, as for any that is linked; its environment was checked before.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    let Some(handle) = NonNull::new(handle) else {
        // SAFETY: the message is a C string until the next call of the loader in this thread.
        let why = unsafe { NonNull::new(libc::dlerror()).map(|text| CStr::from_ptr(text.as_ptr()).to_string_lossy()) };
        return Err(unavailable(why.as_deref().unwrap_or("the loader does not say why not")));
    };
    match FUNCTIONS.iter().find(|name| !has(handle, name)) {
        None => Ok(()),
        Some(name) => Err(unavailable(&format!("it has no {}", name.to_string_lossy()))),
    }
}

fn has(library: NonNull<c_void>, name: &CStr) -> bool {
    // SAFETY: the library is loaded, and the name is a C string.
    !unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) }.is_null()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(settings: &NixlSettings) -> String {
        match load(settings) {
            Err(TransportError::Unavailable(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_library_that_is_not_there_is_named_with_its_place() {
        let library_dir = Some(PathBuf::from("/nowhere/nixl"));
        let settings = NixlSettings { library_dir, environment: Vec::new(), ..NixlSettings::default() };
        let why = refusal(&settings);
        assert!(why.contains("libnixl_capi.so") && why.contains("/nowhere/nixl"), "{why}");
        assert!(why.contains("No such file"), "the loader's own words: {why}");
    }

    #[test]
    fn a_library_of_that_name_which_is_another_is_refused_by_what_it_lacks() {
        // Any library will do: the system's own, under the name that is looked for.
        let dir = std::env::temp_dir().join(format!("penstock-other-nixl-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps.lines().filter_map(|line| line.split_whitespace().last());
        let libc = libc.into_iter().find(|path| path.contains("/libc.so") || path.contains("/libc-")).unwrap();
        std::fs::copy(libc, dir.join(NAME)).unwrap();
        let settings =
            NixlSettings { library_dir: Some(dir.clone()), environment: Vec::new(), ..NixlSettings::default() };
        let why = refusal(&settings);
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(why.contains("it has no nixl_capi_create_configured_agent"), "{why}");
    }

    #[test]
    fn settings_that_came_too_late_are_refused_with_what_is_there() {
        let environment = vec![("PENSTOCK_NEVER_SET".to_owned(), "^shm".to_owned())];
        let settings = NixlSettings { environment, ..NixlSettings::default() };
        let why = refusal(&settings);
        assert!(why.contains("needs PENSTOCK_NEVER_SET=^shm") && why.contains("it is unset"), "{why}");
    }
}
