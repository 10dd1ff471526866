<?php
// The part that a Laravel application already has: the facade DB, over a connection to DATABASE_URL. Then the program of the page.
require 'Illuminate/Database/autoload.php';
require_once 'Illuminate/Support/autoload.php';

$url = parse_url(getenv('DATABASE_URL'));
$container = new Illuminate\Container\Container;
$capsule = new Illuminate\Database\Capsule\Manager($container);
$capsule->addConnection([
    'driver' => 'pgsql', 'host' => $url['host'], 'port' => $url['port'], 'database' => ltrim($url['path'], '/'),
    'username' => $url['user'], 'password' => '', 'charset' => 'utf8', 'prefix' => '',
]);
$container->instance('db', $capsule->getDatabaseManager());
Illuminate\Support\Facades\Facade::setFacadeApplication($container);
require $argv[1];
