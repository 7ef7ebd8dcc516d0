//! Where do workers make themselves known? From the configuration to a discovery service.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use penstock_discovery::{
    Discovery, Etcd, EtcdSettings, Folder, Kubernetes, KubernetesSettings, Memory, Settings, TlsFiles,
};

use crate::config::{Config, DiscoveryAt};

/// The service that is configured. Nothing is asked yet.
///
/// # Errors
/// A setting that cannot be used, by its key.
pub fn open(config: &Config) -> Result<Box<dyn Discovery>> {
    let settings = Settings {
        lease: Duration::from_millis(config.discovery.lease_ms),
        workers_max: config.cluster.workers_max,
        ..Settings::default()
    };
    let made: Box<dyn Discovery> = match &config.cluster.discovery {
        DiscoveryAt::Memory => Box::new(Memory::new(settings).context("discovery")?),
        DiscoveryAt::Folder(path) => Box::new(Folder::new(path, settings).context("cluster.discovery")?),
        DiscoveryAt::Etcd(endpoints) => {
            Box::new(Etcd::new(etcd(config, endpoints)?, settings).context("cluster.discovery")?)
        }
        DiscoveryAt::Kubernetes => {
            Box::new(Kubernetes::new(kubernetes(config)?, settings).context("cluster.discovery")?)
        }
    };
    Ok(made)
}

fn etcd(config: &Config, endpoints: &[String]) -> Result<EtcdSettings> {
    let discovery = &config.discovery;
    let password = |path: &Path| {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("read the password of etcd {} (discovery.etcd_password_file)", path.display()))?;
        anyhow::Ok(text.trim_end_matches(['\r', '\n']).to_owned())
    };
    let user = match (&discovery.etcd_user, &discovery.etcd_password_file) {
        (Some(user), Some(path)) => Some((user.clone(), password(path)?)),
        _ => None,
    };
    Ok(EtcdSettings {
        endpoints: endpoints.to_vec(),
        prefix: discovery.etcd_prefix.clone(),
        tls: tls(config),
        user,
        ..EtcdSettings::default()
    })
}

/// What a pod finds around it, with what is configured in its place. Outside of a cluster everything must be.
fn kubernetes(config: &Config) -> Result<KubernetesSettings> {
    let discovery = &config.discovery;
    let found = KubernetesSettings::in_cluster(|name| std::env::var(name).ok());
    let mut settings = match (found, &discovery.kubernetes_server, &discovery.kubernetes_namespace) {
        (Ok(settings), ..) => settings,
        (Err(_), Some(server), Some(namespace)) => KubernetesSettings {
            server: server.clone(),
            namespace: namespace.clone(),
            selector: String::new(),
            tls: TlsFiles::default(),
            token: None,
            // As in a pod.
            watch_max: Duration::from_secs(240),
        },
        (Err(why), ..) => {
            return Err(why).context(
                "cluster.discovery = kubernetes: outside of a pod name discovery.kubernetes_server and discovery.kubernetes_namespace",
            );
        }
    };
    settings.selector.clone_from(&discovery.kubernetes_selector);
    if let Some(server) = &discovery.kubernetes_server {
        settings.server.clone_from(server);
    }
    if let Some(namespace) = &discovery.kubernetes_namespace {
        settings.namespace.clone_from(namespace);
    }
    if let Some(path) = &discovery.kubernetes_token_file {
        settings.token = Some(path.clone());
    }
    let files = tls(config);
    if files.authorities.is_some() {
        settings.tls = files;
    }
    Ok(settings)
}

fn tls(config: &Config) -> TlsFiles {
    let discovery = &config.discovery;
    let own = discovery.tls_certificate_file.clone().zip(discovery.tls_key_file.clone());
    TlsFiles { authorities: discovery.tls_authorities_file.clone(), own }
}
